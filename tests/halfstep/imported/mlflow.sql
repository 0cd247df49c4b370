CREATE TABLE "experiments" (
	experiment_id INTEGER NOT NULL, 
	name VARCHAR(256) NOT NULL, 
	artifact_location VARCHAR(256), 
	lifecycle_stage VARCHAR(32), 
	creation_time BIGINT, 
	last_update_time BIGINT, 
	workspace VARCHAR(63) DEFAULT 'default' NOT NULL, 
	CONSTRAINT experiment_pk PRIMARY KEY (experiment_id), 
	CONSTRAINT experiments_lifecycle_stage CHECK (lifecycle_stage IN ('active', 'deleted')), 
	CONSTRAINT uq_experiments_workspace_name UNIQUE (workspace, name)
);
CREATE TABLE "runs" (
	run_uuid VARCHAR(32) NOT NULL, 
	name VARCHAR(250), 
	source_type VARCHAR(20), 
	source_name VARCHAR(500), 
	entry_point_name VARCHAR(50), 
	user_id VARCHAR(256), 
	status VARCHAR(9), 
	start_time BIGINT, 
	end_time BIGINT, 
	source_version VARCHAR(50), 
	lifecycle_stage VARCHAR(20), 
	artifact_uri VARCHAR(200), 
	experiment_id INTEGER, deleted_time BIGINT, 
	CONSTRAINT run_pk PRIMARY KEY (run_uuid), 
	CONSTRAINT runs_lifecycle_stage CHECK (lifecycle_stage IN ('active', 'deleted')), 
	CONSTRAINT source_type CHECK (source_type IN ('NOTEBOOK', 'JOB', 'LOCAL', 'UNKNOWN', 'PROJECT')), 
	FOREIGN KEY(experiment_id) REFERENCES experiments (experiment_id), 
	CHECK (status IN ('SCHEDULED', 'FAILED', 'FINISHED', 'RUNNING', 'KILLED'))
);
CREATE TABLE "metrics" (
	"key" VARCHAR(250) NOT NULL, 
	value FLOAT NOT NULL, 
	timestamp BIGINT NOT NULL, 
	run_uuid VARCHAR(32) NOT NULL, 
	step BIGINT DEFAULT '0' NOT NULL, 
	is_nan BOOLEAN DEFAULT '0' NOT NULL, 
	CONSTRAINT metric_pk PRIMARY KEY ("key", timestamp, step, run_uuid, value, is_nan), 
	FOREIGN KEY(run_uuid) REFERENCES runs (run_uuid), 
	CHECK (is_nan IN (0, 1))
);
CREATE TABLE "params" (
	"key" VARCHAR(250) NOT NULL, 
	value VARCHAR(8000) NOT NULL, 
	run_uuid VARCHAR(32) NOT NULL, 
	CONSTRAINT param_pk PRIMARY KEY ("key", run_uuid), 
	FOREIGN KEY(run_uuid) REFERENCES runs (run_uuid)
);
CREATE TABLE "tags" (
	"key" VARCHAR(250) NOT NULL, 
	value VARCHAR(8000), 
	run_uuid VARCHAR(32) NOT NULL, 
	CONSTRAINT tag_pk PRIMARY KEY ("key", run_uuid), 
	FOREIGN KEY(run_uuid) REFERENCES runs (run_uuid)
);
INSERT INTO "experiments" VALUES(0,'Default','/tmp/digits/mlruns/0','active',1795315072331,1795315072331,'default');
INSERT INTO "experiments" VALUES(1,'digits','/tmp/digits/mlruns/1','active',1795315072352,1795315072352,'default');
INSERT INTO "metrics" VALUES('train/loss',1.0,1795315072515,'2e6cd09a503b4323ac34bf99f3d8a6f5',0,0);
INSERT INTO "metrics" VALUES('learning_rate',0.1,1795315072546,'2e6cd09a503b4323ac34bf99f3d8a6f5',0,0);
INSERT INTO "metrics" VALUES('train/loss',0.5,1795315072571,'2e6cd09a503b4323ac34bf99f3d8a6f5',1,0);
INSERT INTO "metrics" VALUES('learning_rate',0.1,1795315072592,'2e6cd09a503b4323ac34bf99f3d8a6f5',1,0);
INSERT INTO "metrics" VALUES('train/loss',3.33333333333333314829e-01,1795315072608,'2e6cd09a503b4323ac34bf99f3d8a6f5',2,0);
INSERT INTO "metrics" VALUES('learning_rate',0.1,1795315072625,'2e6cd09a503b4323ac34bf99f3d8a6f5',2,0);
INSERT INTO "metrics" VALUES('train/loss',0.25,1795315072644,'2e6cd09a503b4323ac34bf99f3d8a6f5',3,0);
INSERT INTO "metrics" VALUES('learning_rate',0.1,1795315072657,'2e6cd09a503b4323ac34bf99f3d8a6f5',3,0);
INSERT INTO "metrics" VALUES('train/loss',0.2,1795315072666,'2e6cd09a503b4323ac34bf99f3d8a6f5',4,0);
INSERT INTO "metrics" VALUES('learning_rate',0.1,1795315072680,'2e6cd09a503b4323ac34bf99f3d8a6f5',4,0);
INSERT INTO "metrics" VALUES('train/loss',1.66666666666666657414e-01,1795315072692,'2e6cd09a503b4323ac34bf99f3d8a6f5',5,0);
INSERT INTO "metrics" VALUES('learning_rate',0.1,1795315072701,'2e6cd09a503b4323ac34bf99f3d8a6f5',5,0);
INSERT INTO "metrics" VALUES('val acc',0.0,1795315072705,'2e6cd09a503b4323ac34bf99f3d8a6f5',5,1);
INSERT INTO "metrics" VALUES('val loss',1.79769313486231562234e+308,1795315072716,'2e6cd09a503b4323ac34bf99f3d8a6f5',5,0);
INSERT INTO "metrics" VALUES('loss',1.0,1795315072751,'cdefe7a50fe74900a0c953a38ef0eebb',5,0);
INSERT INTO "metrics" VALUES('acc',1.0,1795315072764,'4cc6a1b2583e4db3a3e17a2ed28c8585',0,0);
INSERT INTO "metrics" VALUES('acc',1.0,1795315072801,'8b98315de71843f68045bad724dc73cc',0,0);
INSERT INTO "params" VALUES('model/width','8','2e6cd09a503b4323ac34bf99f3d8a6f5');
INSERT INTO "params" VALUES('lr','0.1','2e6cd09a503b4323ac34bf99f3d8a6f5');
INSERT INTO "params" VALUES('note','it''s: ''b''','2e6cd09a503b4323ac34bf99f3d8a6f5');
INSERT INTO "runs" VALUES('2e6cd09a503b4323ac34bf99f3d8a6f5','first','UNKNOWN','','','ada','FINISHED',1795315072446,1795315072724,'','active','/tmp/digits/mlruns/1/2e6cd09a503b4323ac34bf99f3d8a6f5/artifacts',1,NULL);
INSERT INTO "runs" VALUES('cdefe7a50fe74900a0c953a38ef0eebb','bad','UNKNOWN','','','ada','FAILED',1795315072744,1795315072754,'','active','/tmp/digits/mlruns/1/cdefe7a50fe74900a0c953a38ef0eebb/artifacts',1,NULL);
INSERT INTO "runs" VALUES('4cc6a1b2583e4db3a3e17a2ed28c8585','killed','UNKNOWN','','','ada','KILLED',1795315072758,1795315072769,'','active','/tmp/digits/mlruns/1/4cc6a1b2583e4db3a3e17a2ed28c8585/artifacts',1,NULL);
INSERT INTO "runs" VALUES('8b98315de71843f68045bad724dc73cc','gone','UNKNOWN','','','ada','FINISHED',1795315072784,1795315072817,'','deleted','/tmp/digits/mlruns/1/8b98315de71843f68045bad724dc73cc/artifacts',1,1795315072833);
INSERT INTO "tags" VALUES('mlflow.user','ada','2e6cd09a503b4323ac34bf99f3d8a6f5');
INSERT INTO "tags" VALUES('mlflow.source.name','ml.py','2e6cd09a503b4323ac34bf99f3d8a6f5');
INSERT INTO "tags" VALUES('mlflow.source.type','LOCAL','2e6cd09a503b4323ac34bf99f3d8a6f5');
INSERT INTO "tags" VALUES('team','a','2e6cd09a503b4323ac34bf99f3d8a6f5');
INSERT INTO "tags" VALUES('mlflow.runName','first','2e6cd09a503b4323ac34bf99f3d8a6f5');
INSERT INTO "tags" VALUES('mlflow.user','ada','cdefe7a50fe74900a0c953a38ef0eebb');
INSERT INTO "tags" VALUES('mlflow.source.name','ml.py','cdefe7a50fe74900a0c953a38ef0eebb');
INSERT INTO "tags" VALUES('mlflow.source.type','LOCAL','cdefe7a50fe74900a0c953a38ef0eebb');
INSERT INTO "tags" VALUES('mlflow.runName','bad','cdefe7a50fe74900a0c953a38ef0eebb');
INSERT INTO "tags" VALUES('mlflow.user','ada','4cc6a1b2583e4db3a3e17a2ed28c8585');
INSERT INTO "tags" VALUES('mlflow.source.name','ml.py','4cc6a1b2583e4db3a3e17a2ed28c8585');
INSERT INTO "tags" VALUES('mlflow.source.type','LOCAL','4cc6a1b2583e4db3a3e17a2ed28c8585');
INSERT INTO "tags" VALUES('mlflow.runName','killed','4cc6a1b2583e4db3a3e17a2ed28c8585');
INSERT INTO "tags" VALUES('mlflow.user','ada','8b98315de71843f68045bad724dc73cc');
INSERT INTO "tags" VALUES('mlflow.source.name','ml.py','8b98315de71843f68045bad724dc73cc');
INSERT INTO "tags" VALUES('mlflow.source.type','LOCAL','8b98315de71843f68045bad724dc73cc');
INSERT INTO "tags" VALUES('mlflow.runName','gone','8b98315de71843f68045bad724dc73cc');
